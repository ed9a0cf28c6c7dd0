"""What asks a long-running command to end, and what does not."""

from __future__ import annotations

import signal

import pytest

from kvferry.terminal.interrupts import closed_terminal_ignored, stop_signals, stop_signals_interrupt


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_each_of_them_interrupts_and_is_as_before_afterwards(number):
    before = signal.getsignal(number)
    with stop_signals_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_means_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
        with stop_signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # and so it is for what it starts
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_does_not_hurry_a_command_that_stops():
    with stop_signals_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the shell's, after the kernel's
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_nor_one_that_stops_for_another_reason():
    with stop_signals_interrupt():
        with closed_terminal_ignored():
            signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
