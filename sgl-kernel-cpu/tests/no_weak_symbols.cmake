# Fails when an object file defines a weak function outside its own tier namespace.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${NM} cannot read ${object}")
  endif()
  string(REGEX MATCHALL "[0-9a-f]+ [WV] [^\n]*" weak "${symbols}")
  # The personality reference is data that every C++ object carries.
  list(FILTER weak EXCLUDE REGEX "DW\\.ref\\.__gxx_personality_v0")
  if(weak)
    list(JOIN weak "\n  " weak)
    message(FATAL_ERROR "${object} defines weak symbols:\n  ${weak}")
  endif()
endforeach()
