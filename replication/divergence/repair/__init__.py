"""How replicas become equal again: plans, and how they are carried out on sets and on plain databases."""
