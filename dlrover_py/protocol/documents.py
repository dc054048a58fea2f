"""Validated reading of JSON documents that may come from any writer."""

import json
from dataclasses import fields
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dlrover_py.protocol.json_text import decoded
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.protocol.versions import other_version

LARGEST = 1 << 62
"""Upper limit of sizes of files in bytes and of sizes of tensors."""
Size = Annotated[int, Field(ge=0, le=LARGEST - 1, strict=True)]
"""A size or an offset, in bytes or in elements."""
NUMBER = Field(ge=0, le=MAX_COUNT, strict=True)
Number = Annotated[int, NUMBER]
"""A number that reports may have as well."""
Digest = Annotated[int, Field(ge=0, le=(1 << 64) - 1, strict=True)]
"""An XXH3 of 64 bits."""

Text = InstanceOf[str]
"""Text of a user, which UTF-8 may not be able to encode, such as the name of a file."""

FORMAT_NUMBER = Field(ge=1, le=MAX_COUNT, strict=True)
"""Limits of the field ``format``."""
_NEWER = "newer_format"
"""Pydantic's type of the error about a newer format."""

T = TypeVar("T")


class NewerFormatError(ValueError):
    """A document has a newer format than this version of DLRover-Py can read.

    It is not damaged. A program that cannot read it must not remove or overwrite it.
    """


def up_to(newest: int) -> AfterValidator:
    """Return a validator of the field ``format`` of a document, which refuses newer formats.

    The refusal becomes a :class:`NewerFormatError` in :func:`read` and :func:`read_with_text`.

    Args:
        newest: newest format that this version of DLRover-Py can read.
    """

    def check(found: int) -> int:
        if found > newest:
            raise PydanticCustomError(
                _NEWER,
                "it has format {found}, and this version of DLRover-Py reads formats up to "
                "{newest}: use a version that is at least as new as the one that wrote it",
                {"found": found, "newest": newest},
            )
        return found

    return AfterValidator(check)


class Document:
    """Base of the dataclasses that are files of JSON."""

    __slots__ = ()

    def encode(self) -> bytes:
        """Return the document as JSON."""
        return encoded(self)

    @classmethod
    def decode(cls, document: bytes) -> Self:
        """Return the document in bytes of JSON; unknown fields are ignored.

        Raises:
            NewerFormatError: the document has a newer format.
            ValueError: the document is not valid.
        """
        found: Self = read_with_text(_form(cls), document)
        return found


_FORMS: dict[type[Any], TypeAdapter[Any]] = {}


def _form(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the form of the documents of a class, which is made only once."""
    if kind not in _FORMS:
        _FORMS[kind] = TypeAdapter(kind)
    return _FORMS[kind]


def encoded(document: Any) -> bytes:
    """Return a document as JSON: a dataclass becomes an object, and a named tuple a list."""
    return json.dumps(document, separators=(",", ":"), default=_by_name).encode()


def _by_name(document: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; those of inner ones are converted later."""
    return {field.name: getattr(document, field.name) for field in fields(document)}


def read(form: TypeAdapter[T], document: bytes) -> T:
    """Return a document of JSON, checked against its form.

    Types are strict: the text "1" is no number.

    Args:
        form: form of the document; it decides whether unknown fields are ignored.
        document: its bytes.

    Raises:
        NewerFormatError: the document has a newer format.
        ValueError: the document does not have this form; the message names the first fault, what
            was expected, and what was found.
    """
    try:
        return form.validate_json(document, strict=True)
    except ValidationError as error:
        raise _refusal(error) from error


def read_with_text(form: TypeAdapter[T], document: bytes) -> T:
    """Return a document of JSON in which there may be :data:`Text`; unknown fields are ignored.

    Args:
        form: form of the document. Lists are accepted for tuples, and its numbers are strict.
        document: its bytes.

    Raises:
        NewerFormatError: the document has a newer format.
        ValueError: the document does not have this form; the message says what was expected.
    """
    try:
        return form.validate_python(decoded(document))
    except ValidationError as error:
        raise _refusal(error) from error


def _of_version(location: tuple[int | str, ...]) -> bool:
    """Return whether a fault is in a document's version. A request's location has its kind, too."""
    return location[-1:] in (("format",), ("version",))


def _first_fault(error: ValidationError) -> ErrorDetails:
    """Return the fault of a document to report: that of its version, else the first one."""
    faults = error.errors(include_url=False)
    # A document of another version may have other faults, but this one explains them.
    return next((fault for fault in faults if _of_version(fault["loc"])), faults[0])


def _refusal(error: ValidationError) -> ValueError:
    """Return, without raising it, the error that names the first fault of a document in words."""
    fault = _first_fault(error)
    return NewerFormatError(fault["msg"]) if fault["type"] == _NEWER else ValueError(explain(error))


def explain(error: ValidationError) -> str:
    """Return one fault of a document in words, with what was found: its version's, or the first."""
    fault = _first_fault(error)
    where = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ")
    found: Any = fault["input"]
    if fault["loc"][-1:] == ("version",) and fault["type"] == "literal_error":
        return other_version("it", found, fault["ctx"]["expected"])
    if not where:
        return f"it is not valid: {message}"
    shown = ascii(found)[:60] if isinstance(found, (int, float, str)) else type(found).__name__
    return f"its {where}: {message}, found {shown}"
