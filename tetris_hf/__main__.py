"""`python -m tetris_hf` is the command `tetris-hf`."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
