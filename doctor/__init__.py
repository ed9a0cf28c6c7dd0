"""What is odd about a machine, what it means, and what to do about it. Rooms bring their own checks."""

from kvferry.doctor.finding import Finding, Subject, Verdict, fail, ok, warn

__all__ = ["Finding", "Subject", "Verdict", "fail", "ok", "warn"]
