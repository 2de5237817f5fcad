"""The process of the command `srt`, also as `python -m srt`.

It takes charge of signals before it loads anything that takes time; so this module and those on the
way to it import next to nothing.
"""


def main() -> int:
    """Runs the command line of the process; returns its exit status."""
    try:
        from srt.utils.signals import Signals

        signals = Signals()
        signals.install()
        from srt.utils.openmp import restart_with_spin_limit

        with signals.held():
            restart_with_spin_limit()
    except KeyboardInterrupt:
        return 130
    from srt.cli import main as cli

    status = cli.main(signals=signals)
    # A library may have dropped the exception of a signal.
    return status if signals.status is None else signals.status


if __name__ == "__main__":
    raise SystemExit(main())
