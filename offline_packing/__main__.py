"""`python -m offline_packing`."""

from offline_packing.cli.main import main

if __name__ == "__main__":
    main()
