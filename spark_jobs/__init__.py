"""What spark-submit runs: one launcher a job. The jobs themselves stand in ``waldelta.jobs``."""
