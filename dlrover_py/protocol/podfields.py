"""The fields of a Pod template, by type: made by ``python scripts/pod_fields.py --write``.

Source: the models of the Python package ``kubernetes`` 37.0.2. A field is written as
``name`` (a scalar), ``name:any``, ``name:Type``, ``name:[Type]``, ``name:[]`` (a list of scalars)
or ``name:{}`` (a mapping with keys of any name).
"""

from typing import Final

FIELDS: Final[dict[str, str]] = {
    "AWSElasticBlockStoreVolumeSource": "fsType partition readOnly volumeID",
    "Affinity": "nodeAffinity:NodeAffinity podAffinity:PodAffinity podAntiAffinity:PodAntiAffinity",
    "AppArmorProfile": "localhostProfile type",
    "AzureDiskVolumeSource": "cachingMode diskName diskURI fsType kind readOnly",
    "AzureFileVolumeSource": "readOnly secretName shareName",
    "CSIVolumeSource": (
        "driver fsType nodePublishSecretRef:LocalObjectReference readOnly volumeAttributes:{}"
    ),
    "Capabilities": "add:[] drop:[]",
    "CephFSVolumeSource": (
        "monitors:[] path readOnly secretFile secretRef:LocalObjectReference user"
    ),
    "CinderVolumeSource": "fsType readOnly secretRef:LocalObjectReference volumeID",
    "ClusterTrustBundleProjection": (
        "labelSelector:LabelSelector name optional path signerName user"
    ),
    "ConfigMapEnvSource": "name optional",
    "ConfigMapKeySelector": "key name optional",
    "ConfigMapProjection": "items:[KeyToPath] name optional",
    "ConfigMapVolumeSource": "defaultMode defaultUser items:[KeyToPath] name optional",
    "Container": (
        "args:[] command:[] env:[EnvVar] envFrom:[EnvFromSource] image imagePullPolicy "
        "lifecycle:Lifecycle livenessProbe:Probe name ports:[ContainerPort] readinessProbe:Probe "
        "resizePolicy:[ContainerResizePolicy] resources:ResourceRequirements restartPolicy "
        "restartPolicyRules:[ContainerRestartRule] securityContext:SecurityContext "
        "startupProbe:Probe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty "
        "volumeDevices:[VolumeDevice] volumeMounts:[VolumeMount] workingDir"
    ),
    "ContainerPort": "containerPort hostIP hostPort name protocol",
    "ContainerResizePolicy": "resourceName restartPolicy",
    "ContainerRestartRule": "action exitCodes:ContainerRestartRuleOnExitCodes",
    "ContainerRestartRuleOnExitCodes": "operator values:[]",
    "CoreV1ResourceClaim": "name request",
    "DownwardAPIProjection": "items:[DownwardAPIVolumeFile]",
    "DownwardAPIVolumeFile": (
        "fieldRef:ObjectFieldSelector mode path resourceFieldRef:ResourceFieldSelector user"
    ),
    "DownwardAPIVolumeSource": "defaultMode defaultUser items:[DownwardAPIVolumeFile]",
    "EmptyDirVolumeSource": "medium mode sizeLimit",
    "EnvFromSource": "configMapRef:ConfigMapEnvSource prefix secretRef:SecretEnvSource",
    "EnvVar": "name value valueFrom:EnvVarSource",
    "EnvVarSource": (
        "configMapKeyRef:ConfigMapKeySelector fieldRef:ObjectFieldSelector "
        "fileKeyRef:FileKeySelector resourceFieldRef:ResourceFieldSelector "
        "secretKeyRef:SecretKeySelector"
    ),
    "EphemeralContainer": (
        "args:[] command:[] env:[EnvVar] envFrom:[EnvFromSource] image imagePullPolicy "
        "lifecycle:Lifecycle livenessProbe:Probe name ports:[ContainerPort] readinessProbe:Probe "
        "resizePolicy:[ContainerResizePolicy] resources:ResourceRequirements restartPolicy "
        "restartPolicyRules:[ContainerRestartRule] securityContext:SecurityContext "
        "startupProbe:Probe stdin stdinOnce targetContainerName terminationMessagePath "
        "terminationMessagePolicy tty volumeDevices:[VolumeDevice] volumeMounts:[VolumeMount] "
        "workingDir"
    ),
    "EphemeralVolumeSource": "volumeClaimTemplate:PersistentVolumeClaimTemplate",
    "EvictionResponder": "name priority",
    "ExecAction": "command:[]",
    "FCVolumeSource": "fsType lun readOnly targetWWNs:[] wwids:[]",
    "FileKeySelector": "key optional path volumeName",
    "FlexVolumeSource": "driver fsType options:{} readOnly secretRef:LocalObjectReference",
    "FlockerVolumeSource": "datasetName datasetUUID",
    "GCEPersistentDiskVolumeSource": "fsType partition pdName readOnly",
    "GRPCAction": "mode port service",
    "GitRepoVolumeSource": "directory repository revision",
    "GlusterfsVolumeSource": "endpoints path readOnly",
    "HTTPGetAction": "host httpHeaders:[HTTPHeader] path port:any protocol scheme",
    "HTTPHeader": "name value",
    "HostAlias": "hostnames:[] ip",
    "HostPathVolumeSource": "path type",
    "ISCSIVolumeSource": (
        "chapAuthDiscovery chapAuthSession fsType initiatorName iqn iscsiInterface lun portals:[] "
        "readOnly secretRef:LocalObjectReference targetPortal"
    ),
    "ImageVolumeSource": "pullPolicy reference",
    "KeyToPath": "key mode path user",
    "LabelSelector": "matchExpressions:[LabelSelectorRequirement] matchLabels:{}",
    "LabelSelectorRequirement": "key operator values:[]",
    "Lifecycle": "postStart:LifecycleHandler preStop:LifecycleHandler stopSignal",
    "LifecycleHandler": (
        "exec:ExecAction httpGet:HTTPGetAction sleep:SleepAction tcpSocket:TCPSocketAction"
    ),
    "LocalObjectReference": "name",
    "ManagedFieldsEntry": "apiVersion fieldsType fieldsV1:any manager operation subresource time",
    "NFSVolumeSource": "path readOnly server",
    "NodeAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:[PreferredSchedulingTerm] "
        "requiredDuringSchedulingIgnoredDuringExecution:NodeSelector"
    ),
    "NodeSelector": "nodeSelectorTerms:[NodeSelectorTerm]",
    "NodeSelectorRequirement": "key operator values:[]",
    "NodeSelectorTerm": (
        "matchExpressions:[NodeSelectorRequirement] matchFields:[NodeSelectorRequirement]"
    ),
    "ObjectFieldSelector": "apiVersion fieldPath",
    "ObjectMeta": (
        "annotations:{} creationTimestamp deletionGracePeriodSeconds deletionTimestamp "
        "finalizers:[] generateName generation labels:{} managedFields:[ManagedFieldsEntry] name "
        "namespace ownerReferences:[OwnerReference] resourceVersion selfLink uid"
    ),
    "OwnerReference": "apiVersion blockOwnerDeletion controller kind name uid",
    "PersistentVolumeClaimSpec": (
        "accessModes:[] dataSource:TypedLocalObjectReference dataSourceRef:TypedObjectReference "
        "resources:VolumeResourceRequirements selector:LabelSelector storageClassName "
        "volumeAttributesClassName volumeMode volumeName"
    ),
    "PersistentVolumeClaimTemplate": "metadata:ObjectMeta spec:PersistentVolumeClaimSpec",
    "PersistentVolumeClaimVolumeSource": "claimName readOnly",
    "PhotonPersistentDiskVolumeSource": "fsType pdID",
    "PodAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:[WeightedPodAffinityTerm] "
        "requiredDuringSchedulingIgnoredDuringExecution:[PodAffinityTerm]"
    ),
    "PodAffinityTerm": (
        "labelSelector:LabelSelector matchLabelKeys:[] mismatchLabelKeys:[] "
        "namespaceSelector:LabelSelector namespaces:[] topologyKey"
    ),
    "PodAntiAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:[WeightedPodAffinityTerm] "
        "requiredDuringSchedulingIgnoredDuringExecution:[PodAffinityTerm]"
    ),
    "PodCertificateProjection": (
        "certificateChainPath credentialBundlePath keyPath keyType maxExpirationSeconds "
        "signerName user userAnnotations:{}"
    ),
    "PodDNSConfig": "nameservers:[] options:[PodDNSConfigOption] searches:[]",
    "PodDNSConfigOption": "name value",
    "PodOS": "name",
    "PodReadinessGate": "conditionType",
    "PodResourceClaim": "name resourceClaimName resourceClaimTemplateName",
    "PodSchedulingGate": "name",
    "PodSchedulingGroup": "podGroupName",
    "PodSecurityContext": (
        "appArmorProfile:AppArmorProfile fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot "
        "runAsUser seLinuxChangePolicy seLinuxOptions:SELinuxOptions "
        "seccompProfile:SeccompProfile supplementalGroups:[] supplementalGroupsPolicy "
        "sysctls:[Sysctl] windowsOptions:WindowsSecurityContextOptions"
    ),
    "PodSpec": (
        "activeDeadlineSeconds affinity:Affinity automountServiceAccountToken "
        "containers:[Container] dnsConfig:PodDNSConfig dnsPolicy enableServiceLinks "
        "ephemeralContainers:[EphemeralContainer] evictionResponders:[EvictionResponder] "
        "hostAliases:[HostAlias] hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride "
        "imagePullSecrets:[LocalObjectReference] initContainers:[Container] nodeName "
        "nodeSelector:{} os:PodOS overhead:{} preemptionPolicy priority priorityClassName "
        "readinessGates:[PodReadinessGate] resourceClaims:[PodResourceClaim] "
        "resources:ResourceRequirements restartPolicy runtimeClassName schedulerName "
        "schedulingGates:[PodSchedulingGate] schedulingGroup:PodSchedulingGroup "
        "securityContext:PodSecurityContext serviceAccount serviceAccountName setHostnameAsFQDN "
        "shareProcessNamespace subdomain terminationGracePeriodSeconds tolerations:[Toleration] "
        "topologySpreadConstraints:[TopologySpreadConstraint] volumes:[Volume]"
    ),
    "PodTemplateSpec": "metadata:ObjectMeta spec:PodSpec",
    "PortworxVolumeSource": "fsType readOnly volumeID",
    "PreferredSchedulingTerm": "preference:NodeSelectorTerm weight",
    "Probe": (
        "exec:ExecAction failureThreshold grpc:GRPCAction httpGet:HTTPGetAction "
        "initialDelaySeconds periodSeconds successThreshold tcpSocket:TCPSocketAction "
        "terminationGracePeriodSeconds timeoutSeconds"
    ),
    "ProjectedVolumeSource": "defaultMode defaultUser sources:[VolumeProjection]",
    "QuobyteVolumeSource": "group readOnly registry tenant user volume",
    "RBDVolumeSource": (
        "fsType image keyring monitors:[] pool readOnly secretRef:LocalObjectReference user"
    ),
    "ResourceFieldSelector": "containerName divisor resource",
    "ResourceRequirements": "claims:[CoreV1ResourceClaim] limits:{} requests:{}",
    "SELinuxOptions": "level role type user",
    "ScaleIOVolumeSource": (
        "fsType gateway protectionDomain readOnly secretRef:LocalObjectReference sslEnabled "
        "storageMode storagePool system volumeName"
    ),
    "SeccompProfile": "localhostProfile type",
    "SecretEnvSource": "name optional",
    "SecretKeySelector": "key name optional",
    "SecretProjection": "items:[KeyToPath] name optional",
    "SecretVolumeSource": "defaultMode defaultUser items:[KeyToPath] optional secretName",
    "SecurityContext": (
        "allowPrivilegeEscalation appArmorProfile:AppArmorProfile capabilities:Capabilities "
        "privileged procMount readOnlyRootFilesystem runAsGroup runAsNonRoot runAsUser "
        "seLinuxOptions:SELinuxOptions seccompProfile:SeccompProfile "
        "windowsOptions:WindowsSecurityContextOptions"
    ),
    "ServiceAccountTokenProjection": "audience expirationSeconds path user",
    "SleepAction": "seconds",
    "StorageOSVolumeSource": (
        "fsType readOnly secretRef:LocalObjectReference volumeName volumeNamespace"
    ),
    "Sysctl": "name value",
    "TCPSocketAction": "host port:any",
    "Toleration": "effect key operator tolerationSeconds value",
    "TopologySpreadConstraint": (
        "labelSelector:LabelSelector matchLabelKeys:[] maxSkew minDomains nodeAffinityPolicy "
        "nodeTaintsPolicy topologyKey whenUnsatisfiable"
    ),
    "TypedLocalObjectReference": "apiGroup kind name",
    "TypedObjectReference": "apiGroup kind name namespace",
    "Volume": (
        "awsElasticBlockStore:AWSElasticBlockStoreVolumeSource azureDisk:AzureDiskVolumeSource "
        "azureFile:AzureFileVolumeSource cephfs:CephFSVolumeSource cinder:CinderVolumeSource "
        "configMap:ConfigMapVolumeSource csi:CSIVolumeSource downwardAPI:DownwardAPIVolumeSource "
        "emptyDir:EmptyDirVolumeSource ephemeral:EphemeralVolumeSource fc:FCVolumeSource "
        "flexVolume:FlexVolumeSource flocker:FlockerVolumeSource "
        "gcePersistentDisk:GCEPersistentDiskVolumeSource gitRepo:GitRepoVolumeSource "
        "glusterfs:GlusterfsVolumeSource hostPath:HostPathVolumeSource image:ImageVolumeSource "
        "iscsi:ISCSIVolumeSource name nfs:NFSVolumeSource "
        "persistentVolumeClaim:PersistentVolumeClaimVolumeSource "
        "photonPersistentDisk:PhotonPersistentDiskVolumeSource "
        "portworxVolume:PortworxVolumeSource projected:ProjectedVolumeSource "
        "quobyte:QuobyteVolumeSource rbd:RBDVolumeSource scaleIO:ScaleIOVolumeSource "
        "secret:SecretVolumeSource storageos:StorageOSVolumeSource "
        "vsphereVolume:VsphereVirtualDiskVolumeSource"
    ),
    "VolumeDevice": "devicePath name",
    "VolumeMount": (
        "bindMountOptions:[] mountPath mountPropagation name readOnly recursiveReadOnly subPath "
        "subPathExpr"
    ),
    "VolumeProjection": (
        "clusterTrustBundle:ClusterTrustBundleProjection configMap:ConfigMapProjection "
        "downwardAPI:DownwardAPIProjection podCertificate:PodCertificateProjection "
        "secret:SecretProjection serviceAccountToken:ServiceAccountTokenProjection"
    ),
    "VolumeResourceRequirements": "limits:{} requests:{}",
    "VsphereVirtualDiskVolumeSource": "fsType storagePolicyID storagePolicyName volumePath",
    "WeightedPodAffinityTerm": "podAffinityTerm:PodAffinityTerm weight",
    "WindowsSecurityContextOptions": (
        "gmsaCredentialSpec gmsaCredentialSpecName hostProcess runAsUserName"
    ),
}
