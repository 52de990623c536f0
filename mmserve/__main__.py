"""``python -m mmserve``."""

from mmserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
