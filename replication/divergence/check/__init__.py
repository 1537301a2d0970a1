"""A check from the first connection to the written result: tables, second looks, the continuous watch."""
