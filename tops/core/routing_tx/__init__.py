"""Tree routing with advertisements, and transactions over subscriptions, advertisements and publications.

A broker's half is `broker` (what arrives), `tables` and `tree_routes` (regular routing), `steps` (operations of
transactions), `static_plans`, `conflicts` and `termination`; `coordinator` decides for the whole routing domain. A
site's half is `site` (its routes) and `site_transactions` (what it begins and takes part in). The flow and what is
guaranteed: docs/routing-transactions.md.
"""
