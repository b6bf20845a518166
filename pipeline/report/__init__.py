"""From run records to tables, plots and one page that can be read anywhere."""
