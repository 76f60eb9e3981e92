import sys

from nestedmaml.cli import main

if __name__ == "__main__":
    sys.exit(main())
