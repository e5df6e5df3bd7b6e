"""Runs A/B trials of settings in the running job: one trial, its statistical test, and the budget that trials may cost.

In come step times under the current and the candidate setting, out goes a verdict that is valid at any stopping time.
Start with `ab_trial`; `sequential_test` is the e-process, `exploration_budget` charges the time that trials
lost and prices the next switch.
"""
