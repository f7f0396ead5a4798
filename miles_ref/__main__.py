"""`python -m miles_ref` is the console script `miles-ref`."""

from miles_ref.cli import main

if __name__ == "__main__":
    main()
