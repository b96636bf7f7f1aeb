"""What is analysed and on what: the simulation, its steps, the sites that are switched together, the data.

Nothing here measures.
"""
