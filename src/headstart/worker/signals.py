"""Which signals ask a process to drain and end."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT and SIGHUP; not SIGHUP if whoever started the process wants it ignored, as `nohup` does."""
    always = (signal.SIGTERM, signal.SIGINT)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return always if is_ignored else (*always, signal.SIGHUP)
