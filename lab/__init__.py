"""The project's own laboratory: long runs, their committed results, the pages made from them, and the benchmark."""

# Before NumPy, for the threads that it sets.
import experiments as experiments
