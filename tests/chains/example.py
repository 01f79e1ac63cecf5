"""An order's agent: two model calls, a database query, and a memory, in 8 seconds."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

from controller.chains import Budget, Chain, ChainResult


def answer_order(definition: Path, gateway: str, model: str, database: str) -> ChainResult:
    def ask(text: str) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 16}

    def orders_of(customer: int, budget: Budget) -> list[Any]:
        db = sqlite3.connect(database, timeout=budget.share_s)
        rows = db.execute("SELECT item FROM orders WHERE customer = ?", (customer,)).fetchall()
        db.close()
        budget.note(rows=len(rows))
        return rows

    def remember(summary: str, budget: Budget) -> None:
        with sqlite3.connect(database, timeout=budget.share_s) as db:  # once, however often it runs
            row = (budget.step_key, summary)
            db.execute("INSERT OR IGNORE INTO memory (key, summary) VALUES (?, ?)", row)
        db.close()

    with (
        Chain.load(definition, gateway=gateway, store=f"{database}.chains") as chain,
        chain.run("order-42", user="u1") as run,
    ):
        intent = run.call("intent_parse", ask("Where is my order?"))
        run.do("tool_selection", lambda: "orders_of")
        rows = run.do("db_query", orders_of, 42)
        said = intent["choices"][0]["message"]["content"]
        answer = run.call("summary", ask(f"{said}: {rows}"))
        run.do("memory_update", remember, answer["choices"][0]["message"]["content"])
    return run.result()


if __name__ == "__main__":
    result = answer_order(Path(sys.argv[1]), *sys.argv[2:5])
    print("partial" if result.partial else "whole", result.missing, result.spent_ms)
