"""Databases as transactional resources, one file per database, behind the same port."""
