"""``python -m lorikeet`` is the command ``lorikeet``."""

from lorikeet.cli.main import main

if __name__ == "__main__":
    main()
