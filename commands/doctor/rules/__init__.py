"""Holds the doctor's rules: pure functions from facts to findings, one module for each subject.

In come facts (`facts.model`), out go findings with their reasons and remedies.
Start with `registry`, which lists all rules.
"""
