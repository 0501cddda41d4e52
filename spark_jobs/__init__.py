"""The Spark side of waldelta: one stage, one module; flow.py shows them in order."""
