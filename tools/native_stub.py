"""Writes the plans' types in tidewheel/_native.pyi from the fields that native/model/plan.h lists.

Usage, where Tidewheel is installed: python tools/native_stub.py
"""

from __future__ import annotations

from pathlib import Path

from tidewheel import _native

STUB = Path(__file__).parents[1] / "tidewheel" / "_native.pyi"
BEGIN = "# Plans, by tools/native_stub.py:\n"
END = "# End of the plans.\n"


def main() -> None:
    """Write the stub."""
    STUB.write_text(made(STUB.read_text("utf-8")), "utf-8")


def made(stub: str) -> str:
    """The stub with the plans of the installed native module. Raises ValueError if it has no place for them."""
    before, begin, rest = stub.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the plans must stand between {BEGIN.strip()!r} and {END.strip()!r}")
    plans = _native.plan_fields()
    mixers = plans["ResidualBlockPlan"]["mixer"].replace(" | ", "\n    | ")
    plans["ResidualBlockPlan"]["mixer"] = "MixerPlan"
    parts = [_class(name, fields) for name, fields in plans.items()]
    parts.append(f"MixerPlan: TypeAlias = (\n    {mixers}\n)\n")
    return before + BEGIN + "\n" + "\n".join(parts) + "\n" + END + after


def _class(name: str, fields: dict[str, str]) -> str:
    """All fields are required. Otherwise a field that the lowering forgets would silently have the struct's default."""
    lines = [f"    {field}: {type}\n" for field, type in fields.items()]
    return f"class {name}(_Plan):\n{''.join(lines)}"


if __name__ == "__main__":
    main()
