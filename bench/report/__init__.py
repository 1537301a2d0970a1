"""How a benchmark's record is shown: a table in the terminal, pictures, one page that holds everything."""
