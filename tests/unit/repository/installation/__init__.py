"""What an installation consists of: requirements, make setup, the wheel and its licences."""
