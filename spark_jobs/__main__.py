"""``python -m spark_jobs VERB FILE``: the same as ``waldelta VERB FILE``."""

from waldelta.__main__ import main

if __name__ == "__main__":
    main()
