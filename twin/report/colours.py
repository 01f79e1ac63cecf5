"""The colours of every chart, by name: charts name a colour, and whoever draws them looks it up."""

from __future__ import annotations

from typing import Any

LIGHT = {
    "--bg": "#f4f5f7",
    "--card": "#ffffff",
    "--ink": "#1b2430",
    "--muted": "#5d6877",
    "--line": "#dfe3e8",
    "--grid": "#e9ecf0",
    "--accent": "#1f4e79",
    "--p0": "#d97b1c",
    "--p1": "#1f6fc4",
    "--p2": "#12907a",
    "--p3": "#8a55c8",
    "--p4": "#bf3f78",
    "--p5": "#6c7683",
    "--hop-gateway": "#9aa5b1",
    "--hop-queue": "#c8553d",
    "--hop-schedule": "#e3a63a",
    "--hop-prefill": "#3c9470",
    "--hop-decode": "#8db4d8",
    "--hop-network": "#a98bc9",
    "--tier-turbo": "#c8553d",
    "--tier-lent": "#e3a63a",
    "--tier-stable": "#2a8f83",
    "--tier-batch": "#7168c4",
    "--tier-fallback": "#8a6f4d",
    "--good": "#3c9470",
    "--late": "#e3b65a",
    "--shed": "#b9c0c9",
    "--failed": "#c0392b",
    "--ok-bg": "#e3f2ea",
    "--ok": "#1f6b49",
    "--warn-bg": "#fbf0da",
    "--warn": "#7d5510",
}
DARK = {
    "--bg": "#12161b",
    "--card": "#1b2027",
    "--ink": "#e4e8ed",
    "--muted": "#9aa5b3",
    "--line": "#2e353e",
    "--grid": "#2a3038",
    "--accent": "#8fbce6",
    "--p0": "#f0983f",
    "--p1": "#5aa2f0",
    "--p2": "#35b9a0",
    "--p3": "#b28ae6",
    "--p4": "#e26fa3",
    "--p5": "#9aa5b3",
    "--hop-gateway": "#7d8894",
    "--hop-queue": "#d9705a",
    "--hop-schedule": "#d9a03f",
    "--hop-prefill": "#4aa981",
    "--hop-decode": "#5d86ad",
    "--hop-network": "#a98bc9",
    "--tier-turbo": "#e0705a",
    "--tier-lent": "#e3b04f",
    "--tier-stable": "#3fb3a5",
    "--tier-batch": "#958de6",
    "--tier-fallback": "#b3946d",
    "--good": "#4aa981",
    "--late": "#cf9f45",
    "--shed": "#5a6470",
    "--failed": "#d9604f",
    "--ok-bg": "#1d3529",
    "--ok": "#8fd3b0",
    "--warn-bg": "#3a2f18",
    "--warn": "#e6c07a",
}


def coloured(value: Any, colours: dict[str, str]) -> Any:
    """``value`` with the names of colours in it replaced, however deep they lie."""
    if isinstance(value, str):
        return colours.get(value, value)
    if isinstance(value, list | tuple):
        return [coloured(item, colours) for item in value]
    if isinstance(value, dict):
        return {key: coloured(item, colours) for key, item in value.items()}
    return value


def declared(colours: dict[str, str]) -> str:
    """As declarations of a style sheet."""
    return " ".join(f"{name}: {value};" for name, value in colours.items())
