def use():
    pass


def publish():
    pass
