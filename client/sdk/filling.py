"""Filling messages: what one cannot hold is refused with the field, its value and what it may be."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as WireMessage

from kvferry.client.errors import ClientError, InvalidRequest

_BITS_OF: Final = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}
_KIND_OF: Final = {FieldDescriptor.CPPTYPE_STRING: "a text", FieldDescriptor.CPPTYPE_BOOL: "True or False"}

Wire = TypeVar("Wire", bound=WireMessage)


def request_of(kind: type[Wire], refusal: type[ClientError] = InvalidRequest, **given: Any) -> Wire:
    """A message with these fields; None leaves one unset.

    Raises `refusal`, which names the field, its value and what it may be, for what the message cannot hold.
    """
    message = kind()
    for name, value in given.items():
        if value is None:
            continue
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
            raise refusal(f"{name} {_complaint(kind, name, value)}.") from error
    for name, value in given.items():
        if (
            value is not None
            and not kind.DESCRIPTOR.fields_by_name[name].is_repeated
            and not isinstance(value, WireMessage)
        ):
            setattr(message, name, value)  # a value that equals the default must count as set where that is optional
    return message


def _complaint(kind: type[WireMessage], name: str, value: Any) -> str:
    field = kind.DESCRIPTOR.fields_by_name[name]
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        for text in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(text, str):
                return f"cannot be {text!r}: it is a text"
            place = next((index for index, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if place is not None:
                return (
                    f"is not valid Unicode: character {place + 1} is half of a surrogate pair, which is also what "
                    "becomes of bytes that are not UTF-8"
                )
    bits = _BITS_OF.get(field.cpp_type)
    if bits is None:
        return f"cannot be {value!r}: it is {_KIND_OF.get(field.cpp_type, 'a number')}"
    low, high = bits
    if isinstance(value, list | tuple):  # thousands of tokens, maybe: only the wrong one is news
        value = next((one for one in value if not (isinstance(one, int) and low <= one <= high)), value)
    return f"cannot be {value!r}: it is a whole number from {low} to {high}"
