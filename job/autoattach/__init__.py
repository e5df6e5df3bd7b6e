"""Attaches pacecar to a script that does not call it, once it is clear which model it trains with which optimizer.

    optimizer_hook      reports the end of every optimizer's step
    loop_watcher        watches one iteration of the loop: which optimizers step, which model is called
    model_finder        finds the modules that hold an optimizer's parameters, and which of them the loop calls
    tuning_permission   decides what may be done here, and calls `pacecar.attach` at the same step on all ranks
    dataloader_waits    times how long the loop waits for torch's DataLoader
    stderr_lines        writes the lines that the user sees, at the end what was measured and kept

It never guesses: if something is unclear, one line says why and the script is left alone.
"""
