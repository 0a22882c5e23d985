"""`python -m oxrl` is `oxrl`."""

from __future__ import annotations

from oxrl.cli import main

if __name__ == "__main__":
    main()
