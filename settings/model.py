"""The base of every process's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import ByteSize, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvferry.settings.sources import Given, Origin, collect, variable_of
from kvferry.settings.words import all_problems, problem_text


class Settings(BaseSettings):
    """A frozen, validated value; see the description of each field. Made by `load`, or of arguments alone."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=())

    role: ClassVar[str]
    """What the process is: "node"."""
    invalid: ClassVar[type[Exception]]
    """Raised when settings are wrong."""
    here: ClassVar[Mapping[str, Callable[[Any], str | None]]] = {}
    """By setting: why its value cannot be used on this machine; None when it can."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the hook's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: `load` collects the other sources itself, to know whence each value is."""
        return (init_settings,)

    @classmethod
    def load(cls, flags: Mapping[str, Any], file: Path | None = None, *, here: bool = False) -> Self:
        """Flags win over the environment, the environment over the file. ``here``: they are for this machine.

        Raises ``cls.invalid`` with every problem at once.
        """
        settings, problems = cls.judge(collect(cls, cls.role, flags, file), here=here)
        if settings is None or problems:
            raise cls.invalid(all_problems(cls.role, problems))
        return settings

    @classmethod
    def judge(cls, given: Given, *, here: bool) -> tuple[Self | None, list[str]]:
        """The settings, if they can be made of what is given, and all that is wrong."""
        problems = list(given.problems)
        settings = None
        try:
            settings = cls(**given.values)
        except ValidationError as error:
            problems += [cls._sentence(problem, given) for problem in error.errors(include_url=False)]
        if here:
            for name, why_not in cls.here.items():
                value = given.values.get(name)
                if value is not None and (reason := why_not(value)) is not None:
                    problems.append(f"{given.origins[name].name} {reason}")
        return settings, problems

    @classmethod
    def origin(cls, name: str, given: Given) -> Origin:
        """Whence a setting's value is."""
        return given.origins.get(name, Origin("default", name))

    @classmethod
    def variable(cls, name: str) -> str:
        """The environment's name of a setting."""
        return variable_of(cls, name)

    @classmethod
    def _sentence(cls, problem: Mapping[str, Any], given: Given) -> str:
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        field = cls.model_fields.get(name)
        is_size = field is not None and ByteSize in (field.annotation, *get_args(field.annotation))
        return problem_text(problem, cls.origin(name, given).name, is_size=is_size)
