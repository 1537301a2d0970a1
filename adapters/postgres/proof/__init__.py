"""The proof of determinism: a statement is shipped to every replica only if all of them must end with the same rows.

    printed → tree → commands → expressions, tables → verdict

`printed` has the server print the statement as it understands it, `tree` reads that text, `facts` loads from the
catalogue what the tree mentions, and `commands`, `expressions` and `tables` decide, without I/O: what they do not know
is not proved. `functions.txt` is the list of functions that are the same everywhere. From outside it imports nothing
but `adapters.changes` and `tops.model.errors`.
"""

from adapters.postgres.proof.prover import MakeProver, Prover
from adapters.postgres.proof.verdict import SHIPPED, NotProved, Reason, Shipped, Verdict

__all__ = ["SHIPPED", "MakeProver", "NotProved", "Prover", "Reason", "Shipped", "Verdict"]
