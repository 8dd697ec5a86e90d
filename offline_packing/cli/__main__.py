"""`python -m offline_packing`, and `python -m offline_packing.cli`."""

from offline_packing.cli.main import main

if __name__ == "__main__":
    main()
