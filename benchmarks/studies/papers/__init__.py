"""The tables of five papers, run again: `tessera-bench papers`, and docs/results.md.

cell.py      a table as data: cells, the paper's values, claims
running.py   one cell: a simulated fleet that really trains
record.py    the file of finished runs, from which a table goes on
verdicts.py  judges claims by the numbers
plots.py     curves and scatter plots
page.py      the tables as Markdown
tables/      a module for each paper
working.py   runs in this process or several
command.py   `tessera-bench papers`
"""
