"""The project's own laboratory: long runs, their committed results, the pages made from them, and the benchmark."""
