"""A stack in production shape: containers, alerts, a dashboard, systemd units, and the programs that they need.

Nothing here is installed with the product. Programs run inside the product's image, except `demo`, which runs on the
machine that runs the stack.
"""
