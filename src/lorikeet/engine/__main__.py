"""``python -m lorikeet.engine ADDRESS`` is the engine process (``process``)."""

from lorikeet.core.process_tuning import collect_no_garbage


def main() -> None:
    """Run the engine process."""
    collect_no_garbage()
    from lorikeet.engine.process import main as run

    run()


if __name__ == "__main__":
    main()
