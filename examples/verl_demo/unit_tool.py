"""A verl function tool: converts between units of time, length, mass and volume."""

from verl.tools.function_tool import function_tool

UNITS = {
    "time": {"seconds": 1, "minutes": 60, "hours": 3600},
    "length": {"cm": 0.01, "m": 1, "km": 1000},
    "mass": {"g": 0.001, "kg": 1},
    "volume": {"ml": 0.001, "l": 1},
}


@function_tool
def convert_units(value: float, unit: str, to: str) -> dict:
    """Convert a value from one unit to another of the same kind.

    Args:
        value: The value to convert.
        unit: The unit of the value: seconds, minutes, hours, cm, m, km, g, kg, ml or l.
        to: The unit to convert to.
    """
    for factors in UNITS.values():
        if unit in factors and to in factors:
            return {"value": round(value * factors[unit] / factors[to], 9), "unit": to}
    raise ValueError(f"cannot convert {unit} to {to}")
