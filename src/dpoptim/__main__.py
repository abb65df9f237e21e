"""`python -m dpoptim` is the command line."""

import sys

from dpoptim.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
