"""A file of function tools, as ``multi_turn.function_tool_path`` takes it."""

import asyncio

from verl.tools.function_tool import function_tool


@function_tool
async def weather(city: str) -> dict:
    """Tell the weather.

    Args:
        city: Where.
    """
    await asyncio.sleep(0)
    return {"city": city, "sky": "blue"}


@function_tool("divide")
def divide_numbers(a: float, b: float) -> tuple:
    """Divide a by b.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return f"{a / b}", 0.5, {"rest": a % b}
