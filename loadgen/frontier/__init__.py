"""What a sweep found: Pareto fronts, cliffs with their cause, and what each kind of change was worth."""
