"""How is a script measured that does not know pacecar?  It is watched until it is clear what it trains with what.

    ear        the end of every optimizer's step
    watch      one iteration of the loop: which optimizers step, which model is called
    models     which modules hold an optimizer's parameters, and which of them the loop calls
    gathering  have all ranks come as far?  Asked without waiting
    joining    what may be done here, and `pacecar.attach` for it
    waits      how long the loop waits for torch's DataLoader

Nothing is guessed: where it is not clear, one line says why and the script is left alone.
"""
