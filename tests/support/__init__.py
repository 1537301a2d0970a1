<<<<<<< HEAD
"""What tests of several folders need."""
=======
"""Helpers that tests of several areas share."""
>>>>>>> senders
