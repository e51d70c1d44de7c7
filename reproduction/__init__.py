"""The paper's evaluation, run again and judged: published numbers beside true ones."""
