"""The project's own laboratory: long runs, their committed results, the pages made from them, and the benchmark."""

# Before NumPy, for the threads that it sets in a command.
import experiments as experiments
