"""The command line as a module: `python -m quire`."""

import sys

from server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
