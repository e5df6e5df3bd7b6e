"""One A/B trial of a setting in the running job, its statistical test, and what trials may cost.

In come step times under the current and the candidate setting, out goes a verdict that is valid at any stopping time.
Start with `ab_trial`; `sequential_test` is the e-process, `exploration_budget` what is charged for lost time.
"""
