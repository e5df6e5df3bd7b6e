"""Attaches pacecar to a script that does not call it, once it is clear which model it trains with which optimizer.

    optimizer_hook      reports the end of every optimizer's step
    loop_watcher        watches one iteration of the loop: which optimizers step, which model is called
    model_finder        finds the modules that hold an optimizer's parameters, and which of them the loop calls
    rank_gathering      agrees, without waiting, on the step at which all ranks attach
    tuning_permission   decides what may be done here, and calls `pacecar.attach`
    dataloader_waits    times how long the loop waits for torch's DataLoader
    stderr_line         writes the line that the user sees
    outcome_lines       writes others: that there is nothing to tune; at the end what was measured and kept

It never guesses: if something is unclear, one line says why and the script is left alone.
"""
