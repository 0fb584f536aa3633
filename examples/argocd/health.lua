-- Health of a DisaggregatedModel in Argo CD. Without it a custom resource counts as healthy from the start.
local hs = {status = "Progressing", message = "Waiting for the operator"}
if obj.metadata.deletionTimestamp ~= nil then
  hs.message = "Being deleted"
  return hs
end
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return hs
end
local conditions = {}
for _, condition in ipairs(obj.status.conditions or {}) do
  conditions[condition.type] = condition
end
local function is(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end
if is("Stalled") then
  return {status = "Degraded", message = conditions.Stalled.message}
end
if is("Reconciling") then
  hs.message = conditions.Reconciling.message
  return hs
end
if not is("Ready") then
  if conditions.Ready ~= nil then
    hs.message = conditions.Ready.message
  end
  return hs
end
if is("Paused") then
  return {status = "Suspended", message = conditions.Paused.message}
end
return {status = "Healthy", message = conditions.Ready.message}
