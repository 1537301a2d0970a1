"""Who may do what in a replica's database: grants of the logins, their check, and the guard against direct writes."""
