"""Metrics made of a message's fields: one line names each, so that the list can be read, tested and documented."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "kvferry"


@dataclass(frozen=True, slots=True)
class Field:
    """One metric of one field of a message. `name`: after kvferry_; counters get their _total by themselves."""

    field: str
    name: str
    kind: Literal["counter", "gauge"]
    meaning: str

    def family(self, labels: Sequence[str] = ()) -> CounterMetricFamily | GaugeMetricFamily:
        """Without samples."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return kind(f"{PREFIX}_{self.name}", self.meaning, labels=labels)


def counter(field: str, name: str, meaning: str) -> Field:
    """It only grows, from the start of the process."""
    return Field(field, name, "counter", meaning)


def gauge(field: str, name: str, meaning: str) -> Field:
    """It is what it is at the moment."""
    return Field(field, name, "gauge", meaning)


def of_message(message: Message, fields: Iterable[Field]) -> Iterator[Metric]:
    """One sample of each field."""
    for field in fields:
        family = field.family()
        family.add_metric((), float(getattr(message, field.field)))
        yield family


def of_messages(messages: Iterable[Message], fields: Iterable[Field], labels: Mapping[str, str]) -> Iterator[Metric]:
    """A sample of each message; `labels`: the label's name, and the field that has its value."""
    messages = list(messages)
    for field in fields:
        family = field.family(list(labels))
        for message in messages:
            values = [str(getattr(message, source)) for source in labels.values()]
            family.add_metric(values, float(getattr(message, field.field)))
        yield family


def value(name: str, meaning: str, amount: float) -> Metric:
    """What it is at the moment."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}", meaning)
    family.add_metric((), amount)
    return family


def labelled(name: str, meaning: str, label: str, amounts: Mapping[str, float]) -> Metric:
    """The same, one for each value of a label."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}", meaning, labels=[label])
    for of, amount in amounts.items():
        family.add_metric([of], amount)
    return family


def labelled_counter(name: str, meaning: str, label: str, amounts: Mapping[str, float]) -> Metric:
    """How often since the process started, one for each value of a label."""
    family = CounterMetricFamily(f"{PREFIX}_{name}", meaning, labels=[label])
    for of, amount in amounts.items():
        family.add_metric([of], amount)
    return family


def info(name: str, meaning: str, values: Mapping[str, str]) -> Metric:
    """Always 1: what it says is in its labels."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}_info", meaning, labels=list(values))
    family.add_metric(list(values.values()), 1.0)
    return family
