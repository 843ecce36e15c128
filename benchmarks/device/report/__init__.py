"""Reports of `device`: lines, plots, pages, comparisons."""
