"""`python -m oxrl` is `oxrl`."""

from oxrl.cli import main

if __name__ == "__main__":
    main()
